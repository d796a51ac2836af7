import { readFileSync } from "node:fs";
import { HumanMessage } from "@langchain/core/messages";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const configuration = { baseURL: "http://127.0.0.1:8000/v1" };
const model = new ChatOpenAI({ model: "shapes", apiKey: "none", configuration });
const data = readFileSync("docs/pictures/one.jpg").toString("base64");
const image = { type: "image_url", image_url: { url: `data:image/jpeg;base64,${data}` } };
const ask = (text) => [new HumanMessage({ content: [image, { type: "text", text }] })];
const question = ask("What is in the picture?");
const schema = z.object({
  colour: z.enum(["red", "green", "blue", "yellow"]),
  shape: z.enum(["circle", "square", "star", "triangle"]),
});

// text
console.log((await model.invoke("What is in the picture?")).text);

// image
console.log((await model.invoke(question)).text);

// stream
for await (const chunk of await model.stream(question)) {
  process.stdout.write(chunk.text + "|");
}

// structured
const structured = model.withStructuredOutput(schema, { method: "jsonSchema" });
console.log(JSON.stringify(await structured.invoke(question)));

// forced
const forced = model.withStructuredOutput(schema, { method: "functionCalling", strict: true });
console.log(JSON.stringify(await forced.invoke(question)));

// tool
const reportColour = tool(
  async ({ colour }) => {
    console.log(colour);
    return "ok";
  },
  {
    name: "report_colour",
    description: "Report the colour of the picture.",
    schema: z.object({ colour: z.string() }),
  },
);
const agent = createAgent({ model, tools: [reportColour] });
const { messages } = await agent.invoke({ messages: ask("Report the colour of the picture.") });
console.log(messages.at(-1).text);

// usage
const { usage_metadata: usage } = await model.invoke(question);
console.log(usage.input_tokens, usage.output_tokens);

// errors
try {
  await new ChatOpenAI({ model: "another", apiKey: "none", configuration }).invoke(question);
} catch (error) {
  console.log(error.status, error.code, error.message);
}
