"""Settings: explicit beats environment beats default, and nonsense is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.in_turn import in_turn

from covey.base.config import YEAR_SECONDS, GroupConfig, check_timeout, group_config, refuse_unknown
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS, STREAMS_LIMIT


def test_without_any_setting_the_defaults_hold() -> None:
    expected = GroupConfig(lanes="auto", timeout=1800.0, insecure=False, interfaces="", streams="auto")
    assert group_config({"PATH": "/bin"}) == expected


def test_the_environment_beats_the_defaults() -> None:
    env = {"COVEY_LANES": "tcp", "COVEY_TIMEOUT": "2.5", "COVEY_INSECURE": "1", "COVEY_STREAMS": "4"}
    expected = GroupConfig(lanes="tcp", timeout=2.5, insecure=True, streams="4", interfaces="eth*,!eth9")
    assert group_config(env | {"COVEY_INTERFACES": "eth*,!eth9"}) == expected


def test_an_argument_beats_the_environment_and_none_is_no_argument() -> None:
    env = {"COVEY_LANES": "tcp", "COVEY_TIMEOUT": "2.5", "COVEY_INSECURE": "1"}
    assert group_config(env, lanes="unix", timeout=None, insecure=False) == GroupConfig(lanes="unix", timeout=2.5)


@pytest.mark.parametrize("lanes", ["bogus", "", "SHM", "shm,tcp"])
def test_lanes_that_do_not_exist_are_refused_with_those_that_do(lanes: str) -> None:
    with pytest.raises(ConfigError, match=r"auto, shm, unix, tcp") as caught:
        group_config({"COVEY_LANES": lanes})
    assert repr(lanes) in str(caught.value)


def test_memory_lanes_cannot_join_processes_but_the_test_kit_may_ask_for_them() -> None:
    with pytest.raises(ConfigError, match="run_threads"):
        group_config({"COVEY_LANES": "memory"})
    assert GroupConfig(lanes="memory").lanes == "memory"


@pytest.mark.parametrize("text", ["soon", "", "1s", "0", "-1", "nan"])
def test_a_timeout_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"timeout|COVEY_TIMEOUT"):
        group_config({"COVEY_TIMEOUT": text})


@pytest.mark.parametrize("timeout", [0, -0.5, float("nan"), True, "3", None])
def test_check_timeout_refuses_what_is_not_a_number_of_seconds_above_zero(timeout: object) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        check_timeout(timeout)  # type: ignore[arg-type]


def test_check_timeout_returns_what_it_accepts() -> None:
    numbers: tuple[Any, ...] = (1, 0.25, np.float32(3), np.int64(2))
    assert [check_timeout(number) for number in numbers] == [1, 0.25, 3, 2]
    assert check_timeout(float("inf")) == YEAR_SECONDS


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("1", True), ("true", True), ("YES", True), ("0", False), ("", False), ("no", False), ("False", False)],
)
def test_a_flag_takes_the_usual_words(text: str, meaning: bool) -> None:
    assert group_config({"COVEY_INSECURE": text}).insecure is meaning


@pytest.mark.parametrize("text", ["2", "on please", "y"])
def test_a_flag_refuses_other_words(text: str) -> None:
    with pytest.raises(ConfigError, match="COVEY_INSECURE"):
        group_config({"COVEY_INSECURE": text})


def test_an_unknown_variable_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"COVEY_LANE is set.*did you mean COVEY_LANES\?"):
        refuse_unknown({"COVEY_LANE": "shm"})


def test_an_unknown_variable_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unknown({"COVEY_QQQQQQQQ": "1"})
    assert "did you mean" not in str(caught.value)


def test_variables_of_others_are_not_our_business() -> None:
    refuse_unknown({"COVEYOR_BELT": "1", "covey_lanes": "x", "RANK": "0", "COVEY_DEBUG": "1", "COVEY_RANK": "0"})


def test_a_mistake_in_the_environment_counts_even_where_an_argument_overrides_it() -> None:
    with pytest.raises(ConfigError, match="COVEY_TIMEOUT"):
        group_config({"COVEY_TIMEOUT": "soon"}, timeout=3.0)


@pytest.mark.parametrize(("given", "kept"), [("auto", "auto"), (1, "1"), ("8", "8"), (STREAMS_LIMIT, "64")])
def test_streams_are_a_number_or_chosen(given: object, kept: str) -> None:
    assert group_config({}, streams=given).streams == kept
    assert group_config({"COVEY_STREAMS": str(given)}).streams == kept


@pytest.mark.parametrize("given", ["", "0", "-1", "65", "many", "1.5", "²", 0, 1.0])
def test_streams_that_cannot_be_are_refused_with_the_range(given: object) -> None:
    with pytest.raises(ConfigError, match=r"streams=.* auto or a number from 1 to 64"):
        group_config({}, streams=given)


RATES = {
    "20M": 20_000_000, "20Mbit": 20_000_000, "20 Mbit/s": 20_000_000, "2.5MB": 20_000_000, "2.5 MB/s": 20_000_000,
    "100k": 100_000, "100K": 100_000, "1.5G": 1_500_000_000, "125000B": 1_000_000, "100000bit": 100_000, "0": 0,
    123_456: 123_456, 0: 0,
}  # fmt: skip


@in_turn(given=RATES)
def test_a_limit_is_bits_a_second_or_bytes_if_it_says_so(given: object) -> None:
    config = group_config({}, limit=given)
    assert config.limit == RATES[given]
    assert group_config({"COVEY_LIMIT": SETTINGS["limit"].show(config.limit)}) == config


@in_turn(
    given=[
        "",
        "20",
        "20m",
        "20Mb",
        "20Mbps",
        "20MiB",
        "-1M",
        "M",
        "1e6M",
        "20M/h",
        "99k",
        "2T",
        1,
        99_999,
        -1,
        1.5,
        True,
    ]
)
def test_a_limit_that_cannot_be_is_refused_with_examples_or_the_range(given: object) -> None:
    with pytest.raises(ConfigError, match=r"limit=.* (write 20M or 20Mbit|100k to 1000G)"):
        group_config({}, limit=given)


def test_what_launchers_and_clusters_are_told_by_is_known() -> None:
    for name in (
        "RUN",
        "RUN_SIZE",
        "JOIN_TIMEOUT",
        "CLUSTER",
        "SECRET",
        "SECRET_FILE",
        "SEEDS",
        "PORT",
        "HOME",
        "MEET",
    ):
        refuse_unknown({f"COVEY_{name}": "x"})
    with pytest.raises(ConfigError, match=r"did you mean COVEY_SEEDS\?"):
        refuse_unknown({"COVEY_SEED": "10.0.0.1"})


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="lanes"):
        GroupConfig(lanes="bogus")


@pytest.mark.parametrize("name", ["call_handlers", "call_bytes"])
def test_limits_of_calls_are_whole_numbers_above_zero(name: str) -> None:
    assert getattr(group_config({f"COVEY_{name.upper()}": "7"}), name) == 7
    for text in ("0", "-1", "many", "1.5", ""):
        with pytest.raises(ConfigError, match=f"(?i){name}"):
            group_config({f"COVEY_{name.upper()}": text})
    odd: tuple[Any, ...] = (True, 2.0, None)
    for value in odd:
        with pytest.raises(ConfigError, match=name):
            GroupConfig(**{name: value})
