// The playground: an image, a question, and the streamed answer.

import { $, show, text } from "./elements.js";
import { auth, events } from "./server.js";

let image = "", asked = null;

function refuse(words) {
  text($("drop-error"), words);
  $("drop").classList.toggle("refused", Boolean(words));
}

function take(file, more = 0) {
  if (!file) return refuse("That is not a file. Drop an image file, or paste a picture.");
  if (!file.type.startsWith("image/")) {
    const kind = file.type || "a file of unknown type";
    return refuse(`${file.name} is not an image: the browser takes it for ${kind}. The page asks about images, such as PNG, JPEG or WebP.`);
  }
  if (!file.size) return refuse(`${file.name} is empty.`);
  const reader = new FileReader();
  reader.addEventListener("load", () => { image = reader.result; });
  reader.addEventListener("error", () => refuse(`${file.name} can't be read.`));
  reader.readAsDataURL(file);
  refuse(more ? "The page asks about one image: it took the first one." : "");
  URL.revokeObjectURL($("preview").src);
  $("preview").src = URL.createObjectURL(file);
  $("preview").alt = file.name;
  $("preview").hidden = false;
  text($("drop-note"), file.name);
}

async function ask(model, onAnswer) {
  const content = [{ type: "text", text: $("question").value }];
  if (image) content.unshift({ type: "image_url", image_url: { url: image } });
  const started = performance.now();
  const spent = () => show((performance.now() - started) / 1e3, "s");
  let answer = "";
  asked = new AbortController();
  text($("send"), "Stop");
  text($("answer"), "");
  text($("ask-note"), "asking");
  $("answer").className = "";
  try {
    const response = await fetch("ask", {
      method: "POST", signal: asked.signal, headers: { "content-type": "application/json", ...auth() },
      body: JSON.stringify({ model, messages: [{ role: "user", content }], stream: true }),
    });
    onAnswer(response.headers.get("x-request-id"));
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices?.[0]?.delta?.content;
      if (piece && !answer) text($("ask-note"), `first token after ${spent()}`);
      answer += piece ?? "";
      text($("answer"), answer);
    }
    text($("ask-note"), `${$("ask-note").textContent}, answered in ${spent()}`);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    $("answer").className = isStopped ? "" : "bad";
    text($("answer"), isStopped ? answer : error instanceof TypeError ? "The server does not answer." : error.message);
    text($("ask-note"), isStopped ? "stopped" : "no answer");
  }
  asked = null;
  text($("send"), "Ask");
}

// `modelOf` returns the model's name, or nothing while no server answers.
export function listen(modelOf, onAnswer) {
  $("file").addEventListener("change", () => { if ($("file").files.length) take($("file").files[0]); });
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop") take(event.dataTransfer.files[0], event.dataTransfer.files.length - 1);
    });
  }
  document.addEventListener("paste", (event) => { if (event.clipboardData.files.length) take(event.clipboardData.files[0]); });
  $("preview").addEventListener("error", () => {
    $("preview").hidden = true;
    text($("drop-note"), `${$("preview").alt}: the browser can't show it; the server may still read it`);
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (asked) asked.abort();
    else if (modelOf()) ask(modelOf(), onAnswer);
    else text($("ask-note"), "no server answers now");
  });
}
