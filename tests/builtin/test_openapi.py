from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from afferent.builtin.apis.api import TokenCount
from afferent.builtin.apis.registry import APIS, TOKENS
from afferent.media.body.received import ReceivedBody
from tests.builtin.frontends import frontend

COUNTS = [each.api for api in APIS for each in api.besides if isinstance(each, TokenCount)]
COUNTS += [each.api for each in TOKENS]


def document(address: str) -> Any:
    async def main() -> Any:
        async with frontend(address) as http:
            return (await http.get("/openapi.json")).json()

    return asyncio.run(main())


def references(value: Any) -> Iterator[str]:
    match value:
        case {"$ref": str(name)}:
            yield name
        case dict():
            for each in value.values():
                yield from references(each)
        case list():
            for each in value:
                yield from references(each)


def test_all_that_is_served(address: str) -> None:
    described = document(address)
    assert described["openapi"].startswith("3.1")
    paths = described["paths"]
    status = {"/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics", "/openapi.json"}
    status |= {"/version", "/v1/items/lookup"}
    rendered, kept = {f"{api.path}/render" for api in APIS}, "/v1/responses/{id}"
    posted = {api.path for api in (*APIS, *COUNTS)}
    rendered |= {f"/afferent{path}" for path in rendered}
    one = "/v1/conversations/{conversation_id}"
    conversations = {"/v1/conversations", one, f"{one}/items", f"{one}/items/{{item_id}}"}
    assert set(paths) == {*posted, *rendered, kept, *conversations, *status}
    assert set(paths[one]) == {"get", "post", "delete"}
    (schema,) = paths[f"{one}/items"]["post"]["requestBody"]["content"].values()
    assert schema["schema"] == {"$ref": "#/components/schemas/NewItems"}
    for path in posted:
        operation = paths[path]["post"]
        assert operation["requestBody"]["required"]
        assert {"200", "400", "404", "409", "413", "500", "503"} <= set(operation["responses"])
        assert "media_not_cached" in operation["responses"]["409"]["description"]
    assert all(each["summary"] for operations in paths.values() for each in operations.values())
    assert set(paths[kept]) == {"get", "delete"}
    for operation in (*paths[kept].values(), paths["/v1/models/{name}"]["get"]):
        assert {"200", "401", "404"} <= set(operation["responses"])
    assert not any("requestBody" in operation for operation in paths[kept].values())
    (parameter,) = paths["/v1/models/{name}"]["get"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("name", "path")


def test_kinds_of_answers(address: str) -> None:
    paths = document(address)["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            kinds = list(operation["responses"]["200"]["content"])
            if path == "/metrics":
                assert kinds == ["text/plain"]
            elif path in {api.path for api in APIS}:
                assert kinds == ["application/json", "text/event-stream"]
            else:
                assert kinds == ["application/json"]


def test_schemas_are_those_that_check_requests(address: str) -> None:
    described = document(address)
    schemas = described["components"]["schemas"]
    names = {reference.removeprefix("#/components/schemas/") for reference in references(described)}
    assert names == set(schemas), "what is referred to, and nothing else"
    for api in (*APIS, *COUNTS):
        (body,) = described["paths"][api.path]["post"]["requestBody"]["content"].values()
        assert body["schema"]["$ref"].endswith(f"/{api.request_type.__name__}")
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["model", "messages"]
    assert {"type": "integer", "minimum": 1, "maximum": 16} in chat["properties"]["n"]["anyOf"]
    error = schemas["openai_chat_error"]["properties"]["error"]["properties"]
    assert set(error) == {"message", "type", "param", "code"}


def test_who_reads_it_finds_examples_keys_and_groups(address: str) -> None:
    described = document(address)
    tags = {tag["name"] for tag in described["tags"]}
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert set(operation["tags"]) <= tags
            assert ("security" in operation) is path.startswith(
                ("/v1/", "/afferent/v1/", "/tokenize", "/detokenize")
            )
    for api in (*APIS, *COUNTS):
        (body,) = described["paths"][api.path]["post"]["requestBody"]["content"].values()
        text = json.dumps(body["example"]).encode()
        call = api.parse(ReceivedBody(text, {}, len(text)), request_id="r", model="shapes")
        assert call.ignored == ()
    assert set(described["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
