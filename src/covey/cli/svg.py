"""The look of SVG pictures, which follow the reader's choice of light or dark colours."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
    text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #334155; }
    .title { font-size: 20px; font-weight: 600; fill: #0f172a; }
    .heading { font-size: 14px; font-weight: 600; fill: #0f172a; }
    .note, .tick { font-size: 12px; fill: #64748b; }
    .page { fill: #ffffff; }
    .grid { stroke: #e2e8f0; stroke-width: 1; }
    .axis { stroke: #94a3b8; stroke-width: 1; }
    .line { fill: none; stroke-width: 2.25; stroke-linejoin: round; stroke-linecap: round; }
    .opponent { stroke-dasharray: 6 5; stroke-width: 1.75; }
    .dot { stroke-width: 1.5; }
"""
DARK: Final = """
      text { fill: #cbd5e1; }
      .title, .heading { fill: #f8fafc; }
      .note, .tick { fill: #94a3b8; }
      .page { fill: #0f172a; }
      .grid { stroke: #1e293b; }
      .axis { stroke: #475569; }
"""
