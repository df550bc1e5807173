"""Definitions in float64 or better: obvious, slow, right. numpy only; nothing here was written from a kernel."""
