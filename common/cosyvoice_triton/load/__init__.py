"""Loads: what is sent (`samples`, `jobs`, `plan`), where to (`doors`), by whom (`runner`), results (`measure`,
`report`, `plot`). `bench load`, `evaluate` and the soak of tests/ are uses.
"""
