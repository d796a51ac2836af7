import asyncio
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from openai import NotFoundError
from pydantic import BaseModel

model = OpenAILike(
    model="shapes",
    api_base="http://127.0.0.1:8000/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
)
picture = ImageBlock(path="docs/pictures/one.jpg", image_mimetype="image/jpeg")
question = [ChatMessage(blocks=[picture, TextBlock(text="What is in the picture?")])]

# text
print(model.chat([ChatMessage("What is in the picture?")]).message.content)

# image
answer = model.chat(question)
print(answer.message.content)

# stream
for chunk in model.stream_chat(question):
    print(chunk.delta, end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


by_schema = model.model_copy(update={"should_use_structured_outputs": True})
print(by_schema.as_structured_llm(Thing).chat(question).raw.model_dump_json())

# forced
print(model.as_structured_llm(Thing).chat(question).raw.model_dump_json())


# tool
def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


agent = FunctionAgent(tools=[report_colour], llm=model, streaming=False)
picture_task = ChatMessage(blocks=[picture, TextBlock(text="Report the colour of the picture.")])


async def work():
    print(await agent.run(picture_task))


asyncio.run(work())

# usage
print(answer.raw.usage.prompt_tokens, answer.raw.usage.completion_tokens)

# errors
try:
    model.model_copy(update={"model": "another"}).chat(question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
