"""Take the README's picture of the live page: of a server with four users, in a browser.

    python benchmarks/live_page.py --target TARGET --draft DRAFT --prompts FILE --output docs/live_page.png

Needs Chromium and its driver, and Selenium (``pip install '.[test]'``).
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import click
from identity import encode
from selenium import webdriver

from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

USERS, SECONDS = 4, 75  # the page shows the last minute
WIDTH, HEIGHT = 1320, 720


@click.command(help=__doc__)
@click.option("--target", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--draft", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--prompts", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(target: Path, draft: Path, prompts: Path, output: Path) -> None:
    """Start the server, its users and the browser, and write the picture."""
    asked, options = encode(target, [prompts], 16), webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(flag)
    flags = (*CPU_FLAGS, "--served-model-name", target.name, *dspark_flags(draft))
    with LaunchedServer(target, *flags, env=CPU_ENV) as server, ThreadPoolExecutor(USERS) as pool:
        browser = webdriver.Chrome(options=options)
        browser.get(server.url + "/dspark")
        end = time.monotonic() + SECONDS

        def user(number: int) -> None:
            for prompt in islice(cycle(asked), number, None, USERS):
                if time.monotonic() > end:
                    return
                parameters = {"temperature": 0.7, "max_new_tokens": 96}
                server.post_json("/generate", {"input_ids": prompt, "sampling_params": parameters})

        users = [pool.submit(user, number) for number in range(USERS)]
        time.sleep(SECONDS - 5)
        browser.save_screenshot(str(output))
        browser.quit()
        for each in users:
            each.result()


if __name__ == "__main__":
    main()
