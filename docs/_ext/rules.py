"""The directives `rule`, the page of one of the doctor's rules, and `rules`, a table of all of them.

```{rule} NK101
```
"""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from normkit.doctor import RULES
from rule_markdown import rule_as_markdown, rules_as_markdown


class _Rules(SphinxDirective):
    """Markdown made from rules, as a part of the page."""

    def shown(self, markdown: str) -> list[nodes.Node]:
        """What it is on the page."""
        container = nodes.container()
        self.state.nested_parse(StringList(markdown.splitlines(), self.env.docname), 0, container)
        return container.children


class RuleDirective(_Rules):
    """Shows the page of a rule."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse the page as a part of this one."""
        return self.shown(rule_as_markdown(RULES[self.arguments[0]]))


class RulesDirective(_Rules):
    """Lists all rules."""

    def run(self) -> list[nodes.Node]:
        """Parse the table as a part of the page."""
        return self.shown(rules_as_markdown(RULES.values()))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("rule", RuleDirective)
    app.add_directive("rules", RulesDirective)
    return {"parallel_read_safe": True}
