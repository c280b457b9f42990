"""Reports: a Diagnosis in the words of a terminal, a page or a file; nothing is measured here."""
