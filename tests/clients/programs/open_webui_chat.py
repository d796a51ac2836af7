import atexit
import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
settings = {
    "OPENAI_API_BASE_URL": "http://127.0.0.1:8000/v1",
    "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "false",
    # Open WebUI adds tools of its own to each chat. The small model calls them.
    "DEFAULT_MODEL_METADATA": '{"capabilities": {"builtin_tools": false}}',
    "WEBUI_AUTH": "false",  # one user, without a password
    "WEBUI_SECRET_KEY": "none",
    "DATA_DIR": tempfile.mkdtemp(),
    # It downloads no model for its searches.
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",
}
command = ["open-webui", "serve", "--host", "127.0.0.1", "--port", port]
server = subprocess.Popen(command, env=os.environ | settings, stdout=sys.stderr)
atexit.register(server.terminate)

# The page in a browser is at this address; it sends the same requests.
webui = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
is_ready = False
while not is_ready and server.poll() is None:
    time.sleep(1)
    try:
        is_ready = webui.get("/ready").is_success
    except httpx.TransportError:
        continue
user = webui.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
webui.headers["authorization"] = f"Bearer {user['token']}"
(model,) = (each["id"] for each in webui.get("/api/models").json()["data"])

data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()


def ask(text):
    url = f"data:image/jpeg;base64,{data}"
    picture = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]


def complete(**body):
    return webui.post("/api/chat/completions", json={"model": model, **body})


question = ask("What is in the picture?")

# text
blind = [{"role": "user", "content": "What is in the picture?"}]
print(complete(messages=blind).json()["choices"][0]["message"]["content"])

# image
answer = complete(messages=question).json()
print(answer["choices"][0]["message"]["content"])

# stream
for line in complete(messages=question, stream=True).iter_lines():
    if line.startswith("data: {"):
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        print(choice["delta"].get("content") or "", end="|")

# structured
schema = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue", "yellow"]},
        "shape": {"enum": ["circle", "square", "star", "triangle"]},
    },
    "required": ["colour", "shape"],
    "additionalProperties": False,
}
named = {"name": "Thing", "schema": schema, "strict": True}
form = {"type": "json_schema", "json_schema": named}
structured = complete(messages=question, response_format=form).json()
print(structured["choices"][0]["message"]["content"])

# tool
code = '''
class Tools:
    def report_colour(self, colour: str) -> str:
        """Report the colour of the picture."""
        return "ok"
'''
tool = {"id": "report", "name": "report", "content": code, "meta": {"description": "a tool"}}
webui.post("/api/v1/tools/create", json=tool).raise_for_status()
# It calls its tools in its chats only.
task = {"id": "1", "role": "user", "content": "Report the colour of the picture."}
reply = {"id": "2", "role": "assistant", "content": "", "parentId": "1", "model": model}
history = {"currentId": "2", "messages": {"1": task, "2": reply}}
chat = webui.post("/api/v1/chats/new", json={"chat": {"history": history}}).json()["id"]
place = {"chat_id": chat, "session_id": "none", "id": "2"}
complete(messages=ask(task["content"]), tool_ids=["report"], stream=True, **place)
while not reply.get("done"):
    time.sleep(0.1)
    reply = webui.get(f"/api/v1/chats/{chat}").json()["chat"]["history"]["messages"]["2"]
print(reply["output"][0]["arguments"])
print(reply["content"])

# usage
print(answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])

# errors
connections = webui.get("/openai/config").json()
connections["OPENAI_API_CONFIGS"] = {"0": {"enable": True, "model_ids": ["another"]}}
webui.post("/openai/config/update", json=connections).raise_for_status()
webui.get("/api/models", params={"refresh": "true"})
failed = complete(model="another", messages=question)
print(failed.status_code, failed.json()["error"]["message"])
