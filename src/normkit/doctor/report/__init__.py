"""A diagnosis as people and programs read it: terminal, JSON, SARIF, HTML. All of it is made from a Diagnosis alone."""
