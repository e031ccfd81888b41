"""How this machine is used: processor, memory, temperature, GPUs. What is not known is None, never 0.

On Linux from /proc and /sys, and from NVIDIA's driver through its library (NVML), if that is installed; on macOS only
what the system tells without a library. Reading takes a fraction of a millisecond, the first reading of NVIDIA's GPUs
much longer: not for the event loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from covey.base.text import printable
from covey.net.host.machine import hardware
from covey.wire.progress import GPUS_LIMIT, GpuReading, Readings

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_SECONDS: Final = 1.0
"""A machine is read at most this often; in between, the last reading is the answer."""
NAME_LETTERS: Final = 60
_NVML_TEMPERATURE_GPU: Final = 0
SIGNS: Final = (Path("/proc/driver/nvidia"), Path("/dev/dxg"))
"""Where a driver of NVIDIA shows itself, on Linux and in its subsystem of Windows."""
DRIVER_LIBRARIES: Final = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
"""Where its library is."""
_PROC, _SYS = Path("/proc"), Path("/sys")


class MachineReader:
    """Reads this machine, at most once a second. On any thread."""

    def __init__(self, proc: Path = _PROC, sys_folder: Path = _SYS, nvml: Any = None) -> None:
        """`nvml` is NVIDIA's library; by default it is looked for at the first reading."""
        self._proc, self._sys = proc, sys_folder
        self._nvidia = NvidiaGpus(nvml)
        self._lock = threading.Lock()
        self._last: tuple[float, Readings] | None = None
        self._times: tuple[int, int] | None = None
        """The last reading: the time in which cores were busy, and all their time."""

    def read(self) -> Readings:
        """Return how the machine is used now, or was within the last second."""
        with self._lock:
            last = self.last()
            if last is None:
                last = self._read()
                self._last = time.monotonic(), last
            return last

    def last(self) -> Readings | None:
        """Return the last reading, if it is younger than a second. It takes no time."""
        last = self._last
        return last[1] if last is not None and time.monotonic() < last[0] + LEAST_SECONDS else None

    @property
    def is_reading(self) -> bool:
        """Whether a thread reads the machine now."""
        return self._lock.locked()

    def _read(self) -> Readings:
        known = hardware()
        used, total = self._memory()
        gpus = [*self._nvidia.read(), *amd_gpus(self._sys)]
        return Readings(
            os.cpu_count(),
            self._processor(),
            used,
            total if total is not None else known.memory or None,
            self._temperature(),
            tuple(gpus[:GPUS_LIMIT]),
        )

    def _processor(self) -> float | None:
        """Return the share of all cores that was busy since the last reading; at first, of the last minute's load."""
        words = _words(self._proc / "stat")
        if len(words) < 9 or words[0] != "cpu":
            return _load()
        times = list(map(int, words[1:9]))  # user nice system idle iowait irq softirq steal
        idle, whole = times[3] + times[4], sum(times)
        before, self._times = self._times, (whole - idle, whole)
        if before is None or whole <= before[1]:
            return _load()
        return min(1.0, max(0.0, (whole - idle - before[0]) / (whole - before[1])))

    def _memory(self) -> tuple[int | None, int | None]:
        lines = dict(
            (key, value.split()) for key, _, value in (line.partition(":") for line in _lines(self._proc / "meminfo"))
        )
        with contextlib.suppress(KeyError, IndexError, ValueError):
            total, free = 1024 * int(lines["MemTotal"][0]), 1024 * int(lines["MemAvailable"][0])
            return max(0, total - free), total
        return None, None

    def _temperature(self) -> float | None:
        """Return the highest temperature of the processor, or of the board if that is all there is."""
        found: dict[bool, list[float]] = {True: [], False: []}
        for zone in sorted(self._sys.glob("class/thermal/thermal_zone*"))[:64]:
            kind = _text(zone / "type").strip()
            if (degrees := _degrees(zone / "temp")) is not None:
                found[any(word in kind for word in ("pkg", "cpu", "soc", "core"))].append(degrees)
        for monitor in sorted(self._sys.glob("class/hwmon/hwmon*"))[:64]:
            if _text(monitor / "name").strip() in ("coretemp", "k10temp", "zenpower", "cpu_thermal"):
                found[True] += [
                    each for path in sorted(monitor.glob("temp*_input"))[:64] if (each := _degrees(path)) is not None
                ]
        readings = found[True] or found[False]
        return max(readings) if readings else None


def _load() -> float | None:
    """Return the load of the last minute as a share of the cores."""
    try:
        return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    except OSError:
        return None


def amd_gpus(sys_folder: Path) -> list[GpuReading]:
    """Return AMD's GPUs, as their driver shows them below /sys."""
    found = []
    for device in sorted(sys_folder.glob("class/drm/card*/device"))[: 4 * GPUS_LIMIT]:
        if "-" in device.parent.name or _text(device / "vendor").strip() != "0x1002":
            continue  # a connector of a card, or another maker's
        busy, used, total = (
            _number(device / name) for name in ("gpu_busy_percent", "mem_info_vram_used", "mem_info_vram_total")
        )
        temperatures = [
            each for path in sorted(device.glob("hwmon/hwmon*/temp1_input")) if (each := _degrees(path)) is not None
        ]
        found.append(
            GpuReading(
                printable(_text(device / "product_name").strip() or "AMD GPU", NAME_LETTERS),
                None if busy is None else min(1.0, busy / 100),
                used,
                total,
                max(temperatures) if temperatures else None,
            )
        )
    return found


class NvidiaGpus:
    """NVIDIA's GPUs, through NVML.

    `nvmlDeviceGetUtilizationRates` has two figures: the share of time in which a kernel ran, and the share of time in
    which the memory was read or written. The second says nothing about how much memory is used, and is not taken.
    """

    def __init__(
        self, library: Any = None, *, places: Sequence[str | Path] = DRIVER_LIBRARIES, signs: Sequence[Path] = SIGNS
    ) -> None:
        """Without a `library`, look for it in these places once one of the signs of a driver is there."""
        self._library, self._places, self._signs = library, places, signs
        self._handles: list[tuple[Any, str]] | None = None
        """Handle and name of each GPU; None before they were looked for."""

    def read(self) -> list[GpuReading]:
        """Return the GPUs; none if there is no driver."""
        if self._handles is None:
            self._handles = self._open()
        return [self._reading(handle, name) for handle, name in self._handles]

    def _open(self) -> list[tuple[Any, str]]:
        try:
            if self._library is None:
                self._library = self._found()
            library, count = self._library, ctypes.c_uint()
            if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return []
            found = []
            for index in range(min(count.value, GPUS_LIMIT)):
                handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
                if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
                    continue
                library.nvmlDeviceGetName(handle, name, ctypes.c_uint(96))
                found.append((handle, printable(name.value.decode(errors="replace") or "NVIDIA GPU", NAME_LETTERS)))
            return found
        except (OSError, AttributeError):  # no library, or one without these functions
            return []

    def _found(self) -> Any:
        """Return the library; OSError if there is none."""
        if not any(sign.exists() for sign in self._signs):
            raise FileNotFoundError("no driver of NVIDIA")
        for place in self._places[:-1]:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(place))
        return ctypes.CDLL(str(self._places[-1]))

    def _reading(self, handle: Any, name: str) -> GpuReading:
        rates, memory, degrees = _Utilization(), _MemoryInfo(), ctypes.c_uint()
        library = self._library
        has_rates = not library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates))
        has_memory = not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        has_degrees = not library.nvmlDeviceGetTemperature(
            handle, ctypes.c_uint(_NVML_TEMPERATURE_GPU), ctypes.byref(degrees)
        )
        return GpuReading(
            name,
            min(1.0, rates.gpu / 100) if has_rates else None,
            int(memory.used) if has_memory else None,
            int(memory.total) if has_memory else None,
            float(degrees.value) if has_degrees else None,
        )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(65536).decode(errors="replace")
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _words(path: Path) -> list[str]:
    return next(iter(_lines(path)), "").split()


def _number(path: Path) -> int | None:
    try:
        return max(0, int(_text(path)))
    except ValueError:
        return None


def _degrees(path: Path) -> float | None:
    """Return a temperature that a file has in thousandths; None for one that no sensor measures."""
    try:
        degrees = int(_text(path)) / 1000
    except ValueError:
        return None
    return degrees if -50 < degrees < 200 else None
