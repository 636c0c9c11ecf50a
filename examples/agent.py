"""Lets a chat model search by itself, with the tools of `care-mcp`, until it answers.

    python examples/agent.py "孩子半夜发烧怎么办" --chat http://127.0.0.1:8001/v1 --model NAME

The chat server is any with OpenAI's interface and tools. Needs care-client[mcp] and openai.
"""

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from mcp import Client, StdioServerParameters
from openai import AsyncOpenAI

SYSTEM = "你用工具查找资料，再根据资料回答，并注明资料的 id。找不到资料时请直接说明。"
# Calls of the chat model, so that one that only searches comes to an end.
MOST_ROUNDS = 6


async def answer(question: str, tools: Client, chat: AsyncOpenAI, model: str) -> str:
    """Returns the answer of the model after the searches that it asks for."""
    offered: Any = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            },
        }
        for tool in (await tools.list_tools()).tools
    ]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
    ]
    for _ in range(MOST_ROUNDS):
        completion = await chat.chat.completions.create(
            model=model, messages=messages, tools=offered
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            if call.type == "function":
                arguments = json.loads(call.function.arguments)
                result = await tools.call_tool(call.function.name, arguments)
                content = "\n".join(part.text for part in result.content if part.type == "text")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return "没有在限定的次数内得到回答。"


async def main() -> None:
    """Starts `care-mcp` and prints the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service")
    parser.add_argument("--chat", required=True, help="address of the chat server, up to /v1")
    parser.add_argument("--model", required=True, help="name of the chat model")
    options = parser.parse_args()
    server = StdioServerParameters(command="care-mcp", args=["--url", options.url])
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with (
        Client(server) as tools,
        AsyncOpenAI(base_url=options.chat, api_key=key) as chat,
    ):
        text = await answer(options.question, tools, chat, options.model)
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    asyncio.run(main())
