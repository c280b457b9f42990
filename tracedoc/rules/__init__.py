"""The rule engine: YAML conditions over facts become verdicts and findings."""
