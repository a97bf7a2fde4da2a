import argparse
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.config import add_arguments, flag_name, from_mapping, from_namespace, option, parse_bool, parse_int
from octavo_core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Example:
    block_size: int = option(32, "tokens in a block", group="Cache")
    kv_cache_memory_bytes: int | None = option(None, "size of the pool", group="Cache", metavar="BYTES")
    gpu_memory_utilization: float = option(0.9, "share of memory, 100% is 1", group="Cache")
    dtype: str = option("auto", "arithmetic", group="Model", choices=["auto", "float32"])
    enable_prefix_caching: bool = option(True, "reuse prefixes", group="Cache")
    eager: bool = option(False, "do not compile", group="Model")
    tensor_parallel_size: int = option(1, "devices", group="Model", aliases=["--tp", "-tp"])
    origins: tuple[str, ...] = option((), "allowed origins", group="Server")
    ports: tuple[int, ...] = option((), "ports", group="Server")
    not_an_option: int = 7


def parse(*argv: str) -> Example:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, Example)
    return from_namespace(Example, parser.parse_args([*argv]))


def test_without_arguments_every_default_stands() -> None:
    assert parse() == Example()


@pytest.mark.parametrize("form", [["--eager"], ["--eager=true"], ["--eager", "true"], ["--eager=1"], ["--eager=True"]])
def test_a_flag_is_set_by_every_spelling_of_true(form: list[str]) -> None:
    assert parse(*form).eager is True


@pytest.mark.parametrize(
    "form", [["--no-enable-prefix-caching"], ["--enable-prefix-caching=false"], ["--enable-prefix-caching", "off"]]
)
def test_a_flag_is_cleared_by_every_spelling_of_false(form: list[str]) -> None:
    assert parse(*form).enable_prefix_caching is False


def test_a_word_after_a_flag_is_its_value_only_if_it_is_a_truth_value() -> None:
    from octavo_core.config import add_arguments, option

    @dataclasses.dataclass(frozen=True)
    class One:
        quiet: bool = option(False, "q", group="g")

    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    add_arguments(parser, One)
    assert vars(parser.parse_args(["--quiet", "folder"])) == {"quiet": True, "model": "folder"}
    assert vars(parser.parse_args(["--quiet", "false", "folder"])) == {"quiet": False, "model": "folder"}
    assert vars(parser.parse_args(["folder", "--quiet"])) == {"quiet": True, "model": "folder"}


def test_the_last_of_two_spellings_wins() -> None:
    assert parse("--eager", "--no-eager").eager is False


def test_sizes_take_suffixes() -> None:
    assert parse("--block-size", "32K").block_size == 32768
    assert parse("--kv-cache-memory-bytes=1.5GiB").kv_cache_memory_bytes == 3 * 2**29


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-1", -1), ("2k", 2000), ("2K", 2048), ("2Ki", 2048), ("2KiB", 2048), ("1M", 2**20), ("1g", 10**9), ("3B", 3)],
)
def test_parse_int_knows_decimal_and_binary_suffixes(text: str, value: int) -> None:
    assert parse_int(text) == value


@given(st.text("0123456789kKMGiB.-+e infa_", max_size=8))
def test_parse_int_answers_an_integer_or_an_argument_error(text: str) -> None:
    try:
        value = parse_int(text)
    except argparse.ArgumentTypeError:
        return
    assert isinstance(value, int)


@pytest.mark.parametrize("text", ["infK", "nanK", "1e999G", "K", "", "2.5", "0x10"])
def test_parse_int_refuses_what_is_no_integer(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted an integer"):
        parse_int(text)


@pytest.mark.parametrize("text", ["", "maybe", "2"])
def test_parse_bool_refuses_other_words(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted true or false"):
        parse_bool(text)


def test_a_repeated_option_collects_typed_values() -> None:
    config = parse("--origins", "a", "--ports", "1K", "--origins=b")
    assert (config.origins, config.ports) == (("a", "b"), (1024,))


def test_an_alias_sets_the_same_option() -> None:
    assert parse("--tp", "2").tensor_parallel_size == parse("-tp", "2").tensor_parallel_size == 2


def test_a_value_outside_the_choices_is_refused() -> None:
    with pytest.raises(argparse.ArgumentError, match="float32"):
        parse("--dtype", "int8")


def test_help_lists_options_under_their_headings_with_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Example, skip=["origins"])
    text = parser.format_help()
    assert "Cache:" in text
    assert "(default: 32)" in text
    assert "100% is 1" in text
    assert "--origins" not in text
    assert "--not-an-option" not in text
    assert "--no-eager" not in text


def test_two_configs_share_a_heading() -> None:
    other = dataclasses.make_dataclass("Other", [("more", int, option(1, "more", group="Cache"))], frozen=True)
    parser = argparse.ArgumentParser()
    add_arguments(parser, Example)
    add_arguments(parser, other)
    assert parser.format_help().count("Cache:") == 1
    namespace = parser.parse_args(["--more", "2", "--block-size", "16"])
    assert from_namespace(other, namespace) == other(more=2)
    assert from_namespace(Example, namespace).block_size == 16


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="Example has no option 'blok_size'; did you mean 'block_size'"):
        from_mapping(Example, {"blok_size": 1})
    with pytest.raises(ConfigError, match=r"no option 'zzz'$"):
        from_mapping(Example, {"zzz": 1})


def test_lists_from_json_become_tuples() -> None:
    assert from_mapping(Example, {"ports": [1, 2]}).ports == (1, 2)


def test_flag_names_use_dashes() -> None:
    assert flag_name("max_num_seqs") == "--max-num-seqs"
