"""How a machine is used, read from folders and a driver that look like the real ones. What is missing is None."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.compiled import needs_compiler, shared_library

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


NVML = """
/* NVML with two GPUs, as its header declares it; the second one tells only its name and its memory. */
#include <stdio.h>
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef enum { NVML_TEMPERATURE_GPU = 0 } nvmlTemperatureSensors_t;
#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9 };
EXPORT int opened = 0, is_loaded = 1;
static struct nvmlDevice_st { unsigned int index; } devices[2] = {{0}, {1}};

EXPORT int nvmlInit_v2(void) { opened++; return is_loaded ? SUCCESS : DRIVER_NOT_LOADED; }
EXPORT int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return opened ? SUCCESS : UNINITIALIZED; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index > 1) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}
EXPORT int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    snprintf(name, length, "NVIDIA GeForce RTX 409%u\\n", device->index);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    rates->gpu = 42;
    rates->memory = 99; /* the time of the bus, which is no memory in use */
    return device->index ? NOT_SUPPORTED : SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    memory->total = 25757220864ULL;
    memory->used = 7000000000ULL + device->index;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *degrees) {
    *degrees = 71;
    return device->index || sensor != NVML_TEMPERATURE_GPU ? NOT_SUPPORTED : SUCCESS;
}
"""


@pytest.fixture
def driver(tmp_path: Path) -> ctypes.CDLL:
    """Give a library that has NVML's functions, called as the real one is."""
    library = ctypes.CDLL(str(shared_library(tmp_path, NVML)))
    ctypes.c_int.in_dll(library, "opened").value = 0
    ctypes.c_int.in_dll(library, "is_loaded").value = 1
    return library


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


@needs_compiler
def test_nvidia_tells_busy_time_and_memory_and_not_the_time_of_its_bus(driver: ctypes.CDLL) -> None:
    gpus = NvidiaGpus(driver)
    for _ in range(2):
        assert gpus.read() == [
            GpuReading("NVIDIA GeForce RTX 4090\\n", 0.42, 7000000000, 25757220864, 71.0),
            GpuReading("NVIDIA GeForce RTX 4091\\n", None, 7000000001, 25757220864, None),
        ]
    assert ctypes.c_int.in_dll(driver, "opened").value == 1


@needs_compiler
def test_a_driver_without_the_functions_or_without_gpus_is_none(driver: ctypes.CDLL, tmp_path: Path) -> None:
    ctypes.c_int.in_dll(driver, "is_loaded").value = 0
    assert NvidiaGpus(driver).read() == []
    other = tmp_path / "other"
    other.mkdir()
    assert NvidiaGpus(ctypes.CDLL(str(shared_library(other, "int nothing;")))).read() == []


@needs_compiler
def test_the_library_is_found_where_the_driver_is(driver: ctypes.CDLL, tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    known: list[str | Path] = [tmp_path / "none.so", driver._name]
    assert len(NvidiaGpus(places=known, signs=[tmp_path / "proc/driver/nvidia"]).read()) == 2
    assert NvidiaGpus(places=known, signs=[tmp_path / "dev/dxg"]).read() == [], "no driver, so no library is loaded"
    assert NvidiaGpus(places=[tmp_path / "none.so"], signs=[tmp_path]).read() == []


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
