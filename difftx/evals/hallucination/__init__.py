"""The suite hallucination: accuracy of summaries and answers, by a judge."""
