import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const server = createOpenAICompatible({
  name: "afferent",
  baseURL: "http://127.0.0.1:8000/v1",
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = server("shapes");
const image = { type: "file", data: readFileSync("docs/pictures/one.jpg"), mediaType: "image/jpeg" };
const content = [image, { type: "text", text: "What is in the picture?" }];
const messages = [{ role: "user", content }];

// text
console.log((await generateText({ model, prompt: "What is in the picture?" })).text);

// image
console.log((await generateText({ model, messages })).text);

// stream
for await (const delta of streamText({ model, messages }).textStream) {
  process.stdout.write(delta + "|");
}

// structured
const schema = z.object({
  colour: z.enum(["red", "green", "blue", "yellow"]),
  shape: z.enum(["circle", "square", "star", "triangle"]),
});
const { output } = await generateText({ model, messages, output: Output.object({ schema }) });
console.log(JSON.stringify(output));

// tool
const reportColour = tool({
  description: "Report the colour of the picture.",
  inputSchema: z.object({ colour: z.string() }),
  execute: async ({ colour }) => {
    console.log(colour);
    return "ok";
  },
});
const request = { type: "text", text: "Report the colour of the picture." };
const task = { role: "user", content: [image, request] };
const answer = await generateText({
  model,
  messages: [task],
  tools: { report_colour: reportColour },
  stopWhen: stepCountIs(3),
});
console.log(answer.text);

// usage
const { usage } = await generateText({ model, messages });
console.log(usage.inputTokens, usage.outputTokens);

// errors
try {
  await generateText({ model: server("another"), messages });
} catch (error) {
  console.log(APICallError.isInstance(error), error.statusCode, error.message);
}
