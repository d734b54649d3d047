"""The suite `hallucination`: accuracy of summaries and answers, as a judge decides."""
