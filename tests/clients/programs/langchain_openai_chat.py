import base64
from pathlib import Path
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import NotFoundError
from pydantic import BaseModel

model = ChatOpenAI(model="shapes", base_url="http://127.0.0.1:8000/v1", api_key="none")
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
picture = {"type": "image", "base64": data, "mime_type": "image/jpeg"}
question = [HumanMessage([picture, {"type": "text", "text": "What is in the picture?"}])]

# text
print(model.invoke("What is in the picture?").content)

# image
answer = model.invoke(question)
print(answer.content)

# stream
for chunk in model.stream(question):
    print(chunk.content, end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


structured = model.with_structured_output(Thing, method="json_schema")
print(structured.invoke(question).model_dump_json())

# forced
structured = model.with_structured_output(Thing, method="function_calling", strict=True)
print(structured.invoke(question).model_dump_json())


# tool
@tool
def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


with_tools = model.bind_tools([report_colour])
task = [*question, HumanMessage("Report the colour of the picture.")]
called = with_tools.invoke(task)
results = [report_colour.invoke(call) for call in called.tool_calls]
print(with_tools.invoke([*task, called, *results]).content)

# usage
print(answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"])

# errors
try:
    model.model_copy(update={"model_name": "another"}).invoke(question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
