"""The suite hallucination: accuracy of summaries and answers, which a judge decides."""
