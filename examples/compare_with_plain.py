"""Ask a server with DSPARK and a plain SGLang server the same questions, one after the other.

Both servers have the same flags, except those that begin with --speculative-. This shows that texts agree; for speeds
under load, use benchmarks/sweep_concurrency.py.

    python examples/compare_with_plain.py [URL [PLAIN_URL]]
"""

import sys
import time

from openai import OpenAI

URLS = dict(zip(("DSPARK", "plain"), ["http://localhost:30000", "http://localhost:30001"], strict=True))
URLS |= dict(zip(URLS, sys.argv[1:], strict=False))
QUESTIONS = (
    "Why is the sky blue?",
    "Write a function that reverses a string.",
    "Wie heißt die Hauptstadt von Italien?",
)

texts: dict[str, list[str]] = {}
for name, url in URLS.items():
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    begin, tokens, texts[name] = time.perf_counter(), 0, []
    for question in QUESTIONS:
        answer = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=48
        )
        tokens += answer.usage.completion_tokens
        texts[name].append(answer.choices[0].message.content)
    print(f"{name}: {tokens} tokens, {tokens / (time.perf_counter() - begin):.1f} per second")
differ = sum(first != second for first, second in zip(*texts.values(), strict=True))
print("texts that differ:", differ)  # in 16 bits some may: see docs/rl.md, "The same bits"
