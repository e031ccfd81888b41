"""How a machine is used, read from folders and a driver that look like the real ones. What is missing is None."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from covey.net.host import readings
from covey.net.host.readings import MachineReader, NvidiaGpus, amd_gpus
from covey.wire.progress import GpuReading, decode_readings, encode

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Driver:
    """NVML with two GPUs, of which the second tells only its name and its memory."""

    def __init__(self) -> None:
        self.opened = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802 - a name of NVML
        self.opened += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802 - a name of NVML
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802 - a name of NVML
        handle._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> int:  # noqa: N802 - a name of NVML
        name.value = f"GPU {handle.value}\n".encode()
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:  # noqa: N802 - a name of NVML
        rates._obj.gpu, rates._obj.memory = 42, 99
        return 0 if handle.value == 100 else 3

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802 - a name of NVML
        memory._obj.total, memory._obj.free, memory._obj.used = 1000, 400, 600
        return 0

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, degrees: Any) -> int:  # noqa: N802 - a name of NVML
        degrees._obj.value = 71
        return 0 if handle.value == 100 else 3


def test_the_processor_is_busy_by_the_difference_of_two_readings(tmp_path: Path, monkeypatch: Any) -> None:
    proc = tmp_path / "proc"
    write(proc, {"stat": "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1\n", "meminfo": "MemTotal: 8 kB\nMemAvailable: 2 kB\n"})
    monkeypatch.setattr(readings, "LEAST_SECONDS", 0.0)
    reader = MachineReader(proc, tmp_path / "sys")
    first = reader.read()
    assert (first.memory_used, first.memory_total, first.cores) == (6 * 1024, 8 * 1024, os.cpu_count())
    assert first.temperature is None
    write(proc, {"stat": "cpu  160 0 60 820 60 0 0 0 0 0\n"})
    assert reader.read().processor == pytest.approx(0.7)


def test_a_machine_is_read_at_most_once_a_second(tmp_path: Path) -> None:
    write(tmp_path, {"meminfo": "MemTotal: 8 kB\nMemAvailable: 2 kB\n"})
    reader = MachineReader(tmp_path, tmp_path)
    assert reader.last() is None
    first = reader.read()
    write(tmp_path, {"meminfo": "MemTotal: 8 kB\nMemAvailable: 8 kB\n"})
    assert reader.read() is first
    assert reader.last() is first


def test_nothing_that_cannot_be_read_is_zero(tmp_path: Path) -> None:
    told = MachineReader(tmp_path, tmp_path).read()
    assert (told.memory_used, told.temperature, told.gpus) == (None, None, ())
    assert decode_readings(encode(told)) == told


def test_the_temperature_is_that_of_the_processor_and_no_sensor_is_believed_that_measures_nothing(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        {
            "class/thermal/thermal_zone0/type": "acpitz\n",
            "class/thermal/thermal_zone0/temp": "99000\n",
            "class/thermal/thermal_zone1/type": "x86_pkg_temp\n",
            "class/thermal/thermal_zone1/temp": "61500\n",
            "class/hwmon/hwmon0/name": "k10temp\n",
            "class/hwmon/hwmon0/temp1_input": "-274000\n",
        },
    )
    assert MachineReader(tmp_path, tmp_path).read().temperature == 61.5


def test_nvidia_tells_busy_time_and_memory_and_not_the_time_of_its_bus() -> None:
    driver = Driver()
    gpus = NvidiaGpus(driver)
    for _ in range(2):
        assert gpus.read() == [
            GpuReading("GPU 100\\n", 0.42, 600, 1000, 71.0),
            GpuReading("GPU 101\\n", None, 600, 1000, None),
        ]
    assert driver.opened == 1


def test_a_driver_without_the_functions_or_without_gpus_is_none() -> None:
    assert NvidiaGpus(object()).read() == []
    refusing = Driver()
    refusing.nvmlInit_v2 = lambda: 9  # type: ignore[method-assign]
    assert NvidiaGpus(refusing).read() == []


def test_amd_gpus_are_read_below_sys_and_other_cards_are_not(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "class/drm/card0/device/vendor": "0x1002\n",
            "class/drm/card0/device/gpu_busy_percent": "30\n",
            "class/drm/card0/device/mem_info_vram_used": "5\n",
            "class/drm/card0/device/mem_info_vram_total": "10\n",
            "class/drm/card0/device/hwmon/hwmon3/temp1_input": "55000\n",
            "class/drm/card0-DP-1/device/vendor": "0x1002\n",
            "class/drm/card1/device/vendor": "0x8086\n",
            "class/drm/card2/device/vendor": "0x1002\n",
        },
    )
    assert amd_gpus(tmp_path) == [
        GpuReading("AMD GPU", 0.3, 5, 10, 55.0),
        GpuReading("AMD GPU", None, None, None, None),
    ]


def test_this_machine_can_be_read() -> None:
    told = MachineReader().read()
    assert told.cores == os.cpu_count()
    assert told.memory_total
    assert decode_readings(encode(told)) == told
