"""The lab's report: what experiments found, as a page that works offline, as files of numbers, and on a terminal."""

from normkit.lab.report.numbers import write_numbers
from normkit.lab.report.page import write_report
from normkit.lab.report.section import Section
from normkit.lab.report.story import write_story
from normkit.lab.report.terminal import terminal_table

__all__ = ["Section", "terminal_table", "write_numbers", "write_report", "write_story"]
