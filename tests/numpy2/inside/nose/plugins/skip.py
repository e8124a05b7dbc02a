"""Tests that are skipped."""

from unittest import SkipTest as SkipTest
