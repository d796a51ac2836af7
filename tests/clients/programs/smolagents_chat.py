from typing import Literal

from openai import NotFoundError
from PIL import Image
from pydantic import BaseModel
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("shapes", api_base="http://127.0.0.1:8000/v1", api_key="none")
picture = Image.open("docs/pictures/one.jpg")


def ask(text):
    content = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


question = ask("What is in the picture?")

# text
content = [{"type": "text", "text": "What is in the picture?"}]
print(model.generate([{"role": "user", "content": content}]).content)

# image
answer = model.generate(question)
print(answer.content)

# stream
for delta in model.generate_stream(question):
    print(delta.content or "", end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


schema = {"name": "thing", "schema": Thing.model_json_schema()}
wanted = {"type": "json_schema", "json_schema": schema}
print(model.generate(question, response_format=wanted).content)


# tool
@tool
def final_answer(colour: str) -> str:
    """Report the colour of the picture.

    Args:
        colour: The colour.
    """
    return f"{colour=}"


agent = ToolCallingAgent(tools=[final_answer], model=model, verbosity_level=0)
agent.prompt_templates["system_prompt"] = (
    "You are a helpful assistant."  # the default has 2,000 tokens
)
print(agent.run("Report the colour of the picture.", images=[picture]))

# usage
print(answer.token_usage.input_tokens, answer.token_usage.output_tokens)

# errors
try:
    OpenAIModel("another", api_base="http://127.0.0.1:8000/v1", api_key="none").generate(question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
