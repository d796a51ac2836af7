from typing import Literal

from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from openai import NotFoundError
from pydantic import BaseModel

model = OpenAILike(
    model="shapes",
    api_base="http://127.0.0.1:8000/v1",
    api_key="none",
    is_chat_model=True,
    should_use_structured_outputs=True,
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


print(model.as_structured_llm(Thing).chat(question).raw.model_dump_json())

# usage
print(answer.raw.usage.prompt_tokens, answer.raw.usage.completion_tokens)

# errors
try:
    model.model_copy(update={"model": "another"}).chat(question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
