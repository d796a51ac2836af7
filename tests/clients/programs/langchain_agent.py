import base64
from pathlib import Path
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_openai import ChatOpenAI
from openai import NotFoundError
from pydantic import BaseModel


def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


model = ChatOpenAI(model="shapes", base_url="http://127.0.0.1:8000/v1", api_key="none")
agent = create_agent(model, [report_colour], system_prompt="You are a helpful assistant.")
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
picture = {"type": "image", "base64": data, "mime_type": "image/jpeg"}
content = [picture, {"type": "text", "text": "What is in the picture?"}]
question = {"messages": [{"role": "user", "content": content}]}

# text
blind = {"messages": [{"role": "user", "content": "What is in the picture?"}]}
print(agent.invoke(blind)["messages"][-1].text)

# image
print(agent.invoke(question)["messages"][-1].text)

# stream
for chunk, _ in agent.stream(question, stream_mode="messages"):
    print(chunk.text, end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


structured = create_agent(model, [report_colour], response_format=ProviderStrategy(Thing))
print(structured.invoke(question)["structured_response"].model_dump_json())

# forced
structured = create_agent(model, response_format=ToolStrategy(Thing, handle_errors=False))
print(structured.invoke(question)["structured_response"].model_dump_json())

# tool
content[1]["text"] = "Report the colour of the picture."
print(agent.invoke(question)["messages"][-1].text)

# usage
content[1]["text"] = "What is in the picture?"
usage = create_agent(model).invoke(question)["messages"][-1].usage_metadata
print(usage["input_tokens"], usage["output_tokens"])

# errors
try:
    create_agent(model.model_copy(update={"model_name": "another"})).invoke(question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
