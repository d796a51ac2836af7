import asyncio
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, ModelHTTPError, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url="http://127.0.0.1:8000/v1", api_key="none")
agent = Agent(OpenAIChatModel("shapes", provider=provider))
picture = BinaryContent(Path("docs/pictures/one.jpg").read_bytes(), media_type="image/jpeg")
question = [picture, "What is in the picture?"]

# text
print(agent.run_sync("What is in the picture?").output)

# image
answer = agent.run_sync(question)
print(answer.output)


# stream
async def stream():
    async with agent.run_stream(question) as streamed:
        async for delta in streamed.stream_text(delta=True, debounce_by=None):
            print(delta, end="|")


asyncio.run(stream())


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


print(agent.run_sync(question, output_type=NativeOutput(Thing)).output.model_dump_json())

# forced
print(agent.run_sync(question, output_type=Thing).output.model_dump_json())


# tool
@agent.tool_plain
def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


print(agent.run_sync([picture, "Report the colour of the picture."]).output)

# usage
print(answer.usage.input_tokens, answer.usage.output_tokens)

# errors
try:
    Agent(OpenAIChatModel("another", provider=provider)).run_sync(question)
except ModelHTTPError as error:
    print(error.status_code, error.body)
