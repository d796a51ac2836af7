from pathlib import Path
from typing import Literal

from magentic import Chat, FunctionCall, ImageBytes, OpenaiChatModel, StreamedStr, UserMessage
from openai import NotFoundError
from pydantic import BaseModel

model = OpenaiChatModel("shapes", base_url="http://127.0.0.1:8000/v1", api_key="none")
picture = ImageBytes(Path("docs/pictures/one.jpg").read_bytes())
question = [UserMessage([picture, "What is in the picture?"])]


def ask(messages, model=model, **settings):
    return Chat(messages, model=model, **settings).submit().last_message


# text
print(ask([UserMessage("What is in the picture?")]).content)

# image
answer = ask(question)
print(answer.content)

# stream
for piece in ask(question, output_types=[StreamedStr]).content:
    print(piece, end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


print(ask(question, output_types=[Thing]).content.model_dump_json())


# tool
def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


chat = Chat(
    [UserMessage([picture, "Report the colour of the picture."])],
    functions=[report_colour],
    output_types=[str, FunctionCall],
    model=model,
).submit()
while isinstance(chat.last_message.content, FunctionCall):
    chat = chat.exec_function_call().submit()
print(chat.last_message.content)

# usage
print(answer.usage.input_tokens, answer.usage.output_tokens)

# errors
another = OpenaiChatModel("another", base_url="http://127.0.0.1:8000/v1", api_key="none")
try:
    ask(question, model=another)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
