"""Engines that ruler_bench can drive; imports nothing from ruler_bench."""
