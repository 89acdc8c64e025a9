"""Asking a clone for its commit leaves nothing in it, whenever it is broken off."""

import subprocess

from normkit.lab.commit import commit_of_code


def test_the_clone_is_not_locked_while_it_is_asked(monkeypatch):
    asked = []

    def answer(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="abc\n" if "rev-parse" in command else " M file\n")

    monkeypatch.setattr(subprocess, "run", answer)
    assert commit_of_code.__wrapped__() == "abc+changes"
    assert all(command[:2] == ["git", "--no-optional-locks"] for command in asked)
