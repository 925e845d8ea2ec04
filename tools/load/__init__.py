"""Load on a speech server: what to ask (`samples`), how (`runner`), what it gave (`measure`, `report`, `plot`)."""
