"""Pictures of mixture of experts: routes of tokens, load of experts, routing policies."""
