import asyncio
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, MultiModalMessage
from autogen_core import Image
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import NotFoundError
from pydantic import BaseModel

INFO = {
    "vision": True,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


def client(model="shapes"):
    return OpenAIChatCompletionClient(
        model=model, base_url="http://127.0.0.1:8000/v1", api_key="none", model_info=INFO
    )


picture = Image.from_file("docs/pictures/one.jpg")


def viewer(model="shapes", **settings):
    return AssistantAgent("viewer", client(model), system_message=None, **settings)


def ask(text, **settings):
    task = MultiModalMessage(content=[picture, text], source="user")
    return asyncio.run(viewer(**settings).run(task=task)).messages[-1]


# text
print(asyncio.run(viewer().run(task="What is in the picture?")).messages[-1].content)

# image
answer = ask("What is in the picture?")
print(answer.content)


# stream
async def stream():
    task = MultiModalMessage(content=[picture, "What is in the picture?"], source="user")
    async for event in viewer(model_client_stream=True).run_stream(task=task):
        if isinstance(event, ModelClientStreamingChunkEvent):
            print(event.content, end="|")


asyncio.run(stream())


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


thing = ask("What is in the picture?", output_content_type=Thing).content
print(thing.model_dump_json())


# tool
async def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


task = "Report the colour of the picture."
print(ask(task, tools=[report_colour], reflect_on_tool_use=True).content)

# usage
print(answer.models_usage.prompt_tokens, answer.models_usage.completion_tokens)

# errors
try:
    asyncio.run(viewer("another").run(task="What is in the picture?"))
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
