"""What a diagnosis shows beside its findings: tables, charts, and the step of all ranks on one clock."""
