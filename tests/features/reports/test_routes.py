"""The page as it is put together: complete, and sufficient unto itself."""

import base64
import hashlib
import re

import pytest

from sglang_dspark.features.reports.routes import page_document

DOCUMENT, POLICY = page_document(needs_key=False)


def test_nothing_comes_from_elsewhere():
    assert set(re.findall(r"https?://[^\s'\"]+", DOCUMENT)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|script|iframe)\b[^>]*(src|href)=[\"'](?!data:)", DOCUMENT)


@pytest.mark.parametrize("tag", ["style", "script"])
def test_the_policy_allows_what_the_page_contains(tag):
    content = re.search(rf"<{tag}>(.*?)</{tag}>", DOCUMENT, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}'" in POLICY


def test_the_script_finds_every_element_it_names():
    ids = set(re.findall(r'\bid="([^"]+)"', DOCUMENT))
    script = re.search(r"<script>(.*?)</script>", DOCUMENT, re.DOTALL)[1]
    named = set(re.findall(r'\$\("([^"]+)"\)|"((?:tile|chart|facts)-[a-z-]+)"', script))
    named = {name for names in named for name in names if name}
    assert len(named) > 20
    assert named - ids == set()


def test_nothing_is_left_to_fill_in():
    assert re.findall(r"\{\{\w+\}\}", DOCUMENT) == []
    assert 'data-needs-key="yes"' in page_document(needs_key=True)[0]
