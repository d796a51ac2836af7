import asyncio
from typing import Literal

import dspy
from dspy.lm15 import (
    AccessPolicy,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)
from pydantic import BaseModel

URL = "http://127.0.0.1:8000/v1"
access = AccessPolicy(provider="afferent", base_url=URL)
support = ModelSupport(function_calling=True, response_schema=True)
register_provider(ProviderDefinition.chat(access, compat=OpenAIChatCompat()), supports=support)
lm = dspy.LM("afferent/shapes", api_base=URL, api_key="none", cache=False)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
picture = dspy.Image.from_path("docs/pictures/one.jpg")
image = {"type": "image_url", "image_url": {"url": picture.url}}
content = [image, {"type": "text", "text": "What is in the picture?"}]
question = [{"role": "user", "content": content}]

# text
print(lm("What is in the picture?")[0])

# image
print(lm(messages=question)[0])


# stream
class Description(dspy.Signature):
    picture: dspy.Image = dspy.InputField()
    description: str = dspy.OutputField()


async def stream():
    listener = dspy.streaming.StreamListener(signature_field_name="description")
    viewer = dspy.streamify(dspy.Predict(Description), stream_listeners=[listener])
    async for event in viewer(picture=picture):
        if isinstance(event, dspy.streaming.StreamResponse):
            print(event.chunk.strip('"'), end="|")


asyncio.run(stream())


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


class View(dspy.Signature):
    """Name the thing in the picture."""

    picture: dspy.Image = dspy.InputField()
    thing: Thing = dspy.OutputField()


print(dspy.Predict(View)(picture=picture).thing.model_dump_json())


# tool
def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"


class Report(dspy.Signature):
    """Report the colour of the picture."""

    picture: dspy.Image = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


with dspy.context(adapter=dspy.ChatAdapter(use_native_function_calling=True)):
    report = dspy.Predict(Report)(picture=picture, tools=[dspy.Tool(report_colour)])
for call in report.calls.tool_calls:
    report_colour(**call.args)

# usage
lm(messages=question)
usage = lm.history[-1]["usage"]
print(usage["prompt_tokens"], usage["completion_tokens"])

# errors
try:
    dspy.LM("afferent/another", api_base=URL, api_key="none")("What is in the picture?")
except dspy.utils.exceptions.LMUnsupportedModelError as error:
    print(error.status, error.provider_code, error.message)
