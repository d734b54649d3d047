"""The suite `hallucination`: accuracy of summaries and answers, decided by a judge."""
