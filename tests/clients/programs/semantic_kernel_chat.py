import asyncio
from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, ChatMessageContent, ImageContent, TextContent
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function


def service(model="shapes"):
    # A client of its own for each loop of asyncio.
    client = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    return OpenAIChatCompletion(ai_model_id=model, async_client=client)


picture = ImageContent.from_image_file("docs/pictures/one.jpg")


def history(text):
    items = [picture, TextContent(text=text)]
    return ChatHistory(messages=[ChatMessageContent(role="user", items=items)])


def ask(asked, model="shapes", kernel=None, **settings):
    chosen = OpenAIChatPromptExecutionSettings(**settings)
    return asyncio.run(service(model).get_chat_message_content(asked, chosen, kernel=kernel))


question = history("What is in the picture?")

# text
blind = ChatHistory()
blind.add_user_message("What is in the picture?")
print(ask(blind))

# image
answer = ask(question)
print(answer)


# stream
async def stream():
    settings = OpenAIChatPromptExecutionSettings()
    async for chunk in service().get_streaming_chat_message_content(question, settings):
        print(chunk, end="|")


asyncio.run(stream())


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


print(ask(question, response_format=Thing))


# tool
class Reports:
    @kernel_function
    def report_colour(self, colour: str) -> str:
        """Report the colour of the picture."""
        print(f"{colour=}")
        return "ok"


kernel = Kernel()
kernel.add_plugin(Reports(), "reports")
task = history("Report the colour of the picture.")
print(ask(task, kernel=kernel, function_choice_behavior=FunctionChoiceBehavior.Auto()))

# usage
usage = answer.metadata["usage"]
print(usage.prompt_tokens, usage.completion_tokens)

# errors
try:
    ask(question, model="another")
except ServiceResponseException as error:
    print(error)
