from typing import Literal

import instructor
from openai import NotFoundError, OpenAI
from pydantic import BaseModel

openai = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
client = instructor.from_openai(openai)
picture = instructor.Image.from_path("docs/pictures/one.jpg")
question = [{"role": "user", "content": ["What is in the picture?", picture]}]

# text
blind = [{"role": "user", "content": "What is in the picture?"}]
answer = client.create(model="shapes", messages=blind, response_model=None)
print(answer.choices[0].message.content)

# image
answer = client.create(model="shapes", messages=question, response_model=None)
print(answer.choices[0].message.content)

# stream
for chunk in client.create(model="shapes", messages=question, response_model=None, stream=True):
    print(chunk.choices[0].delta.content or "", end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


by_schema = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
thing = by_schema.create(model="shapes", messages=question, response_model=Thing, max_retries=0)
print(thing.model_dump_json())

# forced
thing = client.create(model="shapes", messages=question, response_model=Thing, max_retries=0)
print(thing.model_dump_json())

# usage
print(answer.usage.prompt_tokens, answer.usage.completion_tokens)

# errors
try:
    client.create(model="another", messages=question, response_model=None)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
