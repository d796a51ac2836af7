from typing import Literal

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import tool
from haystack.utils import Secret
from openai import NotFoundError
from pydantic import BaseModel


def generator(model="shapes", **settings):
    return OpenAIChatGenerator(
        model=model,
        api_base_url="http://127.0.0.1:8000/v1",
        api_key=Secret.from_token("none"),
        **settings,
    )


picture = ImageContent.from_file_path("docs/pictures/one.jpg")
question = [ChatMessage.from_user(content_parts=["What is in the picture?", picture])]

# text
blind = [ChatMessage.from_user("What is in the picture?")]
print(generator().run(blind)["replies"][0].text)

# image
answer = generator().run(question)["replies"][0]
print(answer.text)

# stream
generator(streaming_callback=lambda chunk: print(chunk.content, end="|")).run(question)


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


structured = generator(generation_kwargs={"response_format": Thing})
print(structured.run(question)["replies"][0].text)


# tool
@tool
def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


agent = Agent(chat_generator=generator(), tools=[report_colour])
task = [ChatMessage.from_user(content_parts=["Report the colour of the picture.", picture])]
print(agent.run(task)["last_message"].text)

# usage
usage = answer.meta["usage"]
print(usage["prompt_tokens"], usage["completion_tokens"])

# errors
try:
    generator("another").run(question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
