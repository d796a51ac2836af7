import asyncio
import base64
from pathlib import Path
from typing import Literal

from agents import (
    Agent,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, NotFoundError
from pydantic import BaseModel

set_tracing_disabled(True)  # traces are sent to OpenAI
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
picture = {"type": "input_image", "image_url": f"data:image/jpeg;base64,{data}", "detail": "auto"}


def connected():
    # A client serves one loop of asyncio.
    return AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")


def agent(model="shapes", **settings):
    return Agent("Viewer", model=OpenAIResponsesModel(model, connected()), **settings)


def ask(text):
    content = [picture, {"type": "input_text", "text": text}]
    return [{"role": "user", "content": content}]


question = ask("What is in the picture?")

# text
print(Runner.run_sync(agent(), "What is in the picture?").final_output)

# image
answer = Runner.run_sync(agent(), question)
print(answer.final_output)


# stream
async def stream():
    async for event in Runner.run_streamed(agent(), question).stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            print(event.data.delta, end="|")


asyncio.run(stream())


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


print(Runner.run_sync(agent(output_type=Thing), question).final_output.model_dump_json())


# tool
@function_tool
def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


task = ask("Report the colour of the picture.")
print(Runner.run_sync(agent(tools=[report_colour]), task).final_output)


# session
async def two_turns():
    # The session lists the items before each turn: the picture comes back as its name.
    session = OpenAIConversationsSession(openai_client=connected())
    first = await Runner.run(agent(), question, session=session)
    second = await Runner.run(agent(), "What is in picture 1?", session=session)
    print(first.final_output, second.final_output, len(await session.get_items()), sep=", ")


asyncio.run(two_turns())

# usage
usage = answer.context_wrapper.usage
print(usage.input_tokens, usage.output_tokens)

# errors
try:
    Runner.run_sync(agent("another"), question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
