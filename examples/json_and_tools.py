"""Ask for JSON of a schema and for a call of a tool; the tokens that the grammar forces are drafted.

The server needs --tool-call-parser, for instance qwen25. With --constrained-json-disable-any-whitespace, small models
cannot fill the answer with whitespace, and twice as many tokens are forced.

    python examples/json_and_tools.py [URL]
"""

import json
import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:30000"
CITY = {
    "type": "object",
    "properties": {
        "country": {"type": "string", "maxLength": 12},
        "continent": {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]},
        "millions_of_people": {"type": "integer", "minimum": 0, "maximum": 50},
    },
    "required": ["country", "continent", "millions_of_people"],
    "additionalProperties": False,
}
# Without "strict", only the name of the tool follows from the grammar.
FUNCTION = {"name": "describe_city", "description": "Shows a city", "parameters": CITY, "strict": True}

client = OpenAI(base_url=f"{URL}/v1", api_key="unused")
request = {
    "model": "default",
    "messages": [{"role": "user", "content": "Describe the city of Paris."}],
    "temperature": 0,
    "max_tokens": 96,
    "extra_body": {"return_meta_info": True},
}
schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
[choice] = client.chat.completions.create(**request, response_format=schema).choices
print("JSON:", json.loads(choice.message.content))
print("tokens per step:", round(choice.meta_info["dspark"]["accept_length"], 2))

[choice] = client.chat.completions.create(
    **request, tools=[{"type": "function", "function": FUNCTION}], tool_choice="required"
).choices
[call] = choice.message.tool_calls
print("call:", call.function.name, json.loads(call.function.arguments))
