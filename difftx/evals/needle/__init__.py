"""The suite `needle`: retrieval of facts from a long text."""
