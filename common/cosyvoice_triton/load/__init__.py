"""Loads: what is sent (`samples`, `plan`), where to (`doors`), by whom (`runner`), results (`measure`, `report`).
`bench load`, `evaluate` and the soak of tests/ are uses.
"""
