"""The file of API keys, its limits, and the callers made of it."""

import pytest

from service.security.api_keys import ApiKey, check_distinct, digest_api_key, parse_key_file
from service.security.callers import make_callers
from service.security.priorities import PriorityRange
from service.security.quota import KeyLimits
from workers.errors import ConfigError

DEFAULTS = KeyLimits(requests_per_minute=60)


def test_a_line_is_a_key_and_what_it_may():
    text = (
        "# comment\n\n  plain \nlimited name=team-a tokens_per_minute=1000 requests_per_minute=5\n"
    )
    assert parse_key_file(text, DEFAULTS, PriorityRange()) == [
        ApiKey("plain", "key-decd1359b01a", DEFAULTS),
        ApiKey("limited", "team-a", KeyLimits(requests_per_minute=5, tokens_per_minute=1000)),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "the-key word",
        "the-key name=",
        "the-key name=a/b",
        "the-key name=a name=b",
        "the-key requests_per_hour=5",
        "the-key requests_per_minute=0",
        "the-key requests_per_minute=many",
        "the-key min_priority=1",
        "the-key max_priority=-1",
        "the-key max_priority=2147483648",
        "the-key min_priority=low",
    ],
)
def test_a_line_that_cannot_be_is_named_and_its_key_is_not_shown(line):
    with pytest.raises(ConfigError, match="line 2") as raised:
        parse_key_file(f"# one\n{line}\n", DEFAULTS, PriorityRange())
    assert "the-key" not in str(raised.value)


@pytest.mark.parametrize(
    "second", ["b name=one", "a name=two requests_per_minute=9", "a name=two max_priority=9"]
)
def test_ambiguous_keys_are_an_error(second):
    keys = parse_key_file(f"a name=one\n{second}\n", KeyLimits(), PriorityRange())
    with pytest.raises(ConfigError, match="auth"):
        check_distinct(keys)


def test_a_key_without_a_name_is_called_the_same_wherever_it_stands():
    (first, again) = parse_key_file("plain\nplain\n", DEFAULTS, PriorityRange())
    _, moved = parse_key_file("another\n\n# more\nplain\n", DEFAULTS, PriorityRange())
    assert first.name == again.name == moved.name
    check_distinct([first, again])
    assert first.name.removeprefix("key-") not in digest_api_key("plain").hex()


def test_a_line_widens_the_range_of_priorities_that_others_have():
    given = PriorityRange(min_priority=-1)
    plain, wider = parse_key_file("plain\nwider max_priority=5\n", KeyLimits(), given)
    assert plain.priorities == given
    assert wider.priorities == PriorityRange(min_priority=-1, max_priority=5)
    callers = make_callers([plain, wider], float, salt_prefix_cache=False)
    assert callers[digest_api_key("wider")].priorities == wider.priorities


def test_salts_differ_by_key_are_equal_in_every_process_and_do_not_show_the_key():
    keys = [ApiKey("secret-1", "a"), ApiKey("secret-2", "b")]
    here, there = (make_callers(keys, float, salt_prefix_cache=True) for _ in range(2))
    salts = [here[digest_api_key(key.key)].cache_salt for key in keys]
    assert salts == [there[digest_api_key(key.key)].cache_salt for key in keys]
    assert len(set(salts)) == 2
    assert not any("secret" in salt for salt in salts)
    assert here[digest_api_key("secret-1")].salted("x") != here[digest_api_key("secret-2")].salted(
        "x"
    )


def test_without_the_option_a_clients_own_salt_goes_through_unchanged():
    callers = make_callers([ApiKey("k", "a")], float, salt_prefix_cache=False)
    assert callers[digest_api_key("k")].salted("mine") == "mine"


def test_a_key_never_shows_in_a_repr():
    assert "secret" not in repr(ApiKey("secret", "a"))
