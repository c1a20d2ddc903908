"""Tables of the documentation that need no file; the others are in test_evidence.py."""

import pytest

from bench import engines, tables
from bench.results import File, Row


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567, "1,234,567"), (51.234, "51.2"), (5.123, "5.12"), (0.9, "0.900")],
)
def test_number(value, text):
    assert tables.number(value) == text


def test_engines_table_has_the_fastest_that_takes_ids_of_the_device():
    peers = {engines.TPU_INFERENCE: 20.0, engines.SGLANG: 30.0, engines.WHOLE: 12.0}
    peers["one device_put of the whole, memory reused"] = 1.0
    times = {"kernel": 10.5, "pallas": 10.0, "dma": 9.0}
    rows = [
        Row(f"{case}, {name}", "time", "ms", time, None, peers)
        for case in ("load, 2 layers", "store, 2 layers")
        for name, time in times.items()
    ]
    rows.append(Row("load, 2 layers, kernel", "host blocked", "ms", 0.1, None, peers))
    file = File("gpu", "engines", None, None, {}, rows, [])
    assert tables.engines_table([file]).splitlines()[2:] == [
        "| gpu | load, 2 layers | 10 | 20 | 30 | 12 |",
        "| gpu | store, 2 layers | 10 | 20 | 30 | 12 |",
    ]


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_without_figures_say_so(name):
    assert tables.TABLES[name]([]) == "Not measured yet.\n"
