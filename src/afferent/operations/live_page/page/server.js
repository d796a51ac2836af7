// Requests to the page's own server, and streams of events from it.

export const KEY = "afferent-key";

export const auth = () => (sessionStorage.getItem(KEY) ? { authorization: `Bearer ${sessionStorage.getItem(KEY)}` } : {});

export async function* events(stream) {
  let rest = "";
  for await (const chunk of stream.pipeThrough(new TextDecoderStream())) {
    const found = (rest + chunk).split("\n\n");
    rest = found.pop();
    for (const event of found) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
