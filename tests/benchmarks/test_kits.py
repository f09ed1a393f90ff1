"""SGLang's test kits that are run, and their wrong outcomes."""

import pkgutil

from kits import NOT_RUN, REFUSED, kits, kits_of_wheel, wrong


def test_every_kit_is_run_or_left_out_by_name():
    """A name that the wheel no longer has would leave out nothing."""
    run = {kit.__name__ for kit in kits_of_wheel()}
    assert {"CacheHits", "SpecLogprobKit", "AnthropicMessagesMixin", "WaitingTimeoutMixin"} <= run
    modules = {module.name for module in pkgutil.iter_modules(kits.__path__)}
    assert {name for name in NOT_RUN if name.endswith("_kit")} <= modules
    assert not run & NOT_RUN


def test_what_fails_with_dspark_alone_is_wrong_unless_it_is_refused_by_name():
    [(refused, field)] = REFUSED.items()
    outcomes = {
        "alike": ("", ""),
        "the model": ("AssertionError: no Paris", "AssertionError: no Paris"),
        "better": ("AssertionError: no drafts", ""),
        "worse": ("", "AssertionError: 3 != 4"),
        refused: ("", f"AssertionError: 400 != 200 : {field} is not served"),
    }
    rows = [{"kit": "K", "test": test, "plain": plain, "ours": ours} for test, (plain, ours) in outcomes.items()]
    assert wrong(rows) == ["K.worse: AssertionError: 3 != 4"]
    assert wrong([{"kit": "K", "test": refused, "plain": "", "ours": "ConnectionError"}]) != []
