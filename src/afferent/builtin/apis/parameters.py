"""Table of all parameters of requests, by API: the use of each, and the engine feature it needs.

Requests are checked by this table, and ``docs/parameters.md`` is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

CHAT: Final = "openai_chat"
RESPONSES: Final = "openai_responses"
MESSAGES: Final = "anthropic_messages"
COMPLETIONS: Final = "openai_completions"
TOKENIZE: Final = "tokenize"
DETOKENIZE: Final = "detokenize"
_CONVERSATIONS = (CHAT, RESPONSES, MESSAGES)


class Use(Enum):
    """Use of a parameter."""

    HONOURED = "does what it says"
    ACCEPTED = "accepted with any value; changes nothing"


@dataclass(frozen=True, slots=True)
class Only:
    """Accepted with these values and ``null``, which change nothing; refused with others."""

    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a request.

    Attributes:
        name: Name in a request.
        about: Short description.
        uses: Its use in each API by name; other APIs do not know it.
        needs: Field of `Sampling` that the engine must support for it.
    """

    name: str
    about: str
    uses: Mapping[str, Use | Only]
    needs: str = ""


H, A = Use.HONOURED, Use.ACCEPTED


def _in(
    apis: Sequence[str], name: str, about: str, use: Use | Only = H, *, needs: str = ""
) -> Parameter:
    return Parameter(name, about, dict.fromkeys(apis, use), needs)


_everywhere = partial(_in, (*_CONVERSATIONS, COMPLETIONS))
_in_conversations = partial(_in, _CONVERSATIONS)
_in_openai = partial(_in, (CHAT, RESPONSES))
_in_chat, _in_responses, _in_messages = (
    partial(_in, (api,)) for api in (CHAT, RESPONSES, MESSAGES)
)


_ASKED = (
    Parameter(
        "model",
        "the name of the model that is served",
        dict.fromkeys((*_CONVERSATIONS, COMPLETIONS, TOKENIZE, DETOKENIZE), H),
    ),
    Parameter("messages", "what was said", {CHAT: H, MESSAGES: H, TOKENIZE: H}),
    Parameter("prompt", "a text, or its tokens", {COMPLETIONS: H, TOKENIZE: H}),
    Parameter("tokens", "of a text", {DETOKENIZE: H}),
    _in_responses("input", "what was said"),
    _in_responses("instructions", "a system message before all others"),
    _in_messages("system", "a system message before all others"),
    _in_responses("previous_response_id", "the conversation goes on from this answer"),
    _in_responses("conversation", "the conversation with this id goes on"),
    _everywhere("stream", "the answer comes as events"),
    Parameter(
        "stream_options",
        "whether usage comes at the end of a stream",
        {CHAT: H, COMPLETIONS: H},
    ),
    _in_responses("stream_options", "of events that there are not", A),
)

_SAMPLING = (
    Parameter("max_tokens", "most tokens of the answer", {CHAT: H, MESSAGES: H, COMPLETIONS: H}),
    _in_chat("max_completion_tokens", "the same, by its newer name"),
    _in_responses("max_output_tokens", "most tokens of the answer"),
    _everywhere(
        "temperature", "0: the likeliest token; more: less likely ones", needs="temperature"
    ),
    _everywhere("top_p", "of the likeliest tokens that have this probability", needs="top_p"),
    _everywhere("top_k", "of so many likeliest tokens; 0 and -1 are off", needs="top_k"),
    _everywhere("min_p", "of tokens at least this part as likely as the likeliest", needs="min_p"),
    _everywhere(
        "repetition_penalty",
        "logits of tokens of prompt and answer are divided by it, or multiplied below 0",
        needs="repetition_penalty",
    ),
    _everywhere(
        "frequency_penalty",
        "taken from a token's logit each time that the answer has it, -2 to 2",
        needs="frequency_penalty",
    ),
    _everywhere(
        "presence_penalty",
        "taken from the logit of each token that the answer has, -2 to 2",
        needs="presence_penalty",
    ),
    _everywhere(
        "logit_bias", "added to the logits of tokens, by their ids, -100 to 100", needs="logit_bias"
    ),
    _everywhere("seed", "the same draws each time", needs="seed"),
    Parameter("n", "so many answers, up to 16", {CHAT: H, COMPLETIONS: H}),
    Parameter(
        "logprobs",
        "log-probabilities of tokens",
        {CHAT: H, COMPLETIONS: Only()},
        "num_logprobs",
    ),
    _in_openai("top_logprobs", "and of the likeliest instead", needs="num_logprobs"),
    _in_responses("include", "`message.output_text.logprobs` asks for them; others change nothing"),
)

_FORMED: Final = dict.fromkeys((CHAT, COMPLETIONS), H)
_FORM = (
    Parameter("response_format", "`json_object`, or `json_schema`: JSON", _FORMED, "json_schema"),
    _in_responses("text", "its `format`: likewise", needs="json_schema"),
    _in_messages("output_config", "its `format`: likewise", needs="json_schema"),
    _in_messages("output_format", "the same, by its older name", needs="json_schema"),
    _everywhere("structured_outputs", "`json`, `json_object`, `regex` or `choice`; vLLM's"),
    Parameter("guided_json", "JSON of this schema; vLLM's older name", _FORMED, "json_schema"),
    Parameter("guided_regex", "what this expression matches; likewise", _FORMED, "regex"),
    Parameter("guided_choice", "one of these texts; likewise", _FORMED, "choice"),
)

_TOOLS = (
    _in_conversations(
        "tools",
        "functions that the answer may call; with the `tool_choice` `none` they mean nothing",
        needs="tools",
    ),
    _in_conversations(
        "tool_choice", "whether the answer calls none, some or one of them", needs="tools"
    ),
    _in_openai("parallel_tool_calls", "whether an answer may call several", needs="tools"),
    _in_chat("functions", "`tools` by their older name", needs="tools"),
    _in_chat("function_call", "`tool_choice` by its older name", needs="tools"),
)

_ENDS = (
    Parameter(
        "stop", "strings before which the answer ends", {CHAT: H, RESPONSES: H, COMPLETIONS: H}
    ),
    _in_messages("stop_sequences", "strings before which the answer ends"),
    _everywhere("stop_token_ids", "tokens that end the answer", needs="stop_token_ids"),
    _everywhere("include_stop_str_in_output", "what ended the answer is a part of it"),
    _everywhere("min_tokens", "nothing ends the answer before so many", needs="min_tokens"),
    _everywhere("ignore_eos", "the answer goes on behind the token that ends it"),
    _everywhere("skip_special_tokens", "whether special tokens are no text of the answer"),
)

_TEMPLATE: Final = {**dict.fromkeys(_CONVERSATIONS, H), TOKENIZE: H}

_PROMPT = (
    Parameter("chat_template_kwargs", "variables for the model's chat template", _TEMPLATE),
    Parameter(
        "add_generation_prompt", "whether the assistant's turn is begun in the prompt", _TEMPLATE
    ),
    Parameter(
        "continue_final_message",
        "the answer goes on with the last message, the assistant's",
        _TEMPLATE,
    ),
    _in_chat("reasoning_effort", "for the chat template, if it has a use for it"),
    _in_responses("reasoning", "its `effort` likewise"),
    _in_messages("thinking", "of models that think; none does here", A),
)

_ACCEPTED = (
    _in_responses("store", "whether the answer can be gone on with"),
    _in_chat("store", "OpenAI's list of answers, which there is not here", A),
    Parameter("metadata", "the client's own notes", {CHAT: A, RESPONSES: H, MESSAGES: A}),
    Parameter("user", "who asks", {CHAT: A, RESPONSES: A, COMPLETIONS: A}),
    _in_openai("safety_identifier", "who asks", A),
    _in_openai("prompt_cache_key", "what was seen before is known by its content", A),
    _in_openai("prompt_cache_retention", "likewise", A),
    _in_responses("prompt_cache_options", "likewise", A),
    _in_messages("cache_control", "likewise", A),
    _everywhere("cache_salt", "likewise; nothing is shared between tenants", A),
    _everywhere("service_tier", "there is one", A),
    _in_messages("speed", "there is one", A),
    _everywhere("priority", "requests are served in fair shares", A),
    _everywhere("request_id", "each answer has an id of its own", A),
    _everywhere("session_id", "the client's own note", A),
    _in_messages("inference_geo", "where the model runs: here", A),
    _in_messages("user_profile_id", "who asks", A),
    _in_messages("workspace_id", "who asks", A),
    _in_messages("betas", "what is new in Anthropic's API", A),
    _in_messages("context_management", "what may be left out of a conversation; nothing is", A),
    _in_chat("verbosity", "how long answers of some models are", A),
    _in_chat("prediction", "makes answers of some servers faster", A),
    _in_conversations("include_reasoning", "of models that think", A),
    _in_conversations("thinking_token_budget", "of models that think", A),
    _in_responses("max_tool_calls", "calls of the server's own tools, which there are not", A),
)

_REFUSED = (
    Parameter("tool_choice", "tools need messages", {COMPLETIONS: Only(("none", "auto"))}),
    _in_chat("guided_grammar", "answers of a given grammar", Only()),
    _in_chat("modalities", "answers are text", Only((["text"],))),
    _in_chat("audio", "answers are text", Only()),
    _in_responses("image", "answers are text", Only()),
    _in_chat("web_search_options", "nothing is searched", Only()),
    _in_responses(
        "truncation",
        "nothing is left out of a prompt; one that is too long is refused",
        Only(("disabled", "auto")),
    ),
    _everywhere("truncate_prompt_tokens", "nothing is left out of a prompt", Only()),
    _in_responses("background", "answers are waited for", Only((False,))),
    _in_responses("context_management", "nothing is left out of a prompt", Only(([],))),
    _in_responses("prompt", "prompts that OpenAI keeps", Only()),
    _in_responses("moderation", "nothing is moderated", Only()),
    _in_responses("access_programs", "programs of OpenAI's", Only()),
    _in_chat("moderation", "nothing is moderated", Only()),
    _in_messages("compaction", "a conversation is not made shorter here", Only()),
    _in_messages("container", "of Anthropic's own tools", Only()),
    _in_messages("thread", "a conversation is sent whole each time", Only()),
    _in_messages("mcp_servers", "of Anthropic's own tools", Only(([],))),
    _in_messages("diagnostics", "of Anthropic's", Only()),
    _everywhere("use_beam_search", "tokens are chosen one by one", Only((False,))),
    _everywhere("best_of", "each answer is given", Only((1,))),
    _everywhere("length_penalty", "tokens are chosen one by one", Only((1,))),
    _everywhere("bad_words", "what may not be said", Only(([],))),
    _everywhere("allowed_token_ids", "what may be said alone", Only()),
    _everywhere("repetition_detection", "whether answers end that repeat themselves", Only()),
    _everywhere("watermarking", "marks in what is drawn", Only((False,))),
    _everywhere("prompt_logprobs", "log-probabilities of the prompt", Only()),
    _everywhere("logprob_token_ids", "log-probabilities of given tokens", Only()),
    _everywhere("return_token_ids", "answers are text", Only((False,))),
    _everywhere("return_tokens_as_token_ids", "tokens are written as text", Only((False,))),
    _everywhere("spaces_between_special_tokens", "none are added", Only((True,))),
    _everywhere("echo", "the answer does not repeat what it goes on with", Only((False,))),
    _in_conversations("add_special_tokens", "the chat template writes them", Only((False,))),
    Parameter(
        "add_special_tokens",
        "the tokenizer's own are written around a text",
        {COMPLETIONS: Only((True,)), TOKENIZE: H},
    ),
    Parameter("suffix", "a text that stands behind the answer", {COMPLETIONS: Only(("",))}),
    Parameter("return_token_strs", "tokens one by one as text", {TOKENIZE: Only((False,))}),
    _in_conversations("chat_template", "the template is the model's own", Only()),
    _in_conversations(
        "documents", "by `chat_template_kwargs`, if the template takes them", Only(([],))
    ),
    _in_conversations("mm_processor_kwargs", "how media are made is a setting", Only(({},))),
    _in_conversations("media_io_kwargs", "how media are made is a setting", Only(({},))),
    _everywhere("kv_transfer_params", "of vLLM's", Only(({},))),
    _everywhere("ec_transfer_params", "of vLLM's", Only(({},))),
    _everywhere("vllm_xargs", "of vLLM's", Only(({},))),
)

GROUPS: Final[Mapping[str, tuple[Parameter, ...]]] = {
    "What is asked": _ASKED,
    "How tokens are chosen": _SAMPLING,
    "Which form an answer has": _FORM,
    "Which tools an answer may call": _TOOLS,
    "Where an answer ends": _ENDS,
    "How the prompt is written": _PROMPT,
    "Accepted by some": _ACCEPTED,
    "Refused, but for values that change nothing": _REFUSED,
}

PARAMETERS: Final = tuple(one for group in GROUPS.values() for one in group)
"""Parameters of all APIs; one may occur twice, for different APIs."""


def of_api(api: str) -> dict[str, Parameter]:
    """Return all parameters of an API, by name."""
    return {one.name: one for one in PARAMETERS if api in one.uses}
