"""Who may call, how much, and over what wire: keys, quotas, TLS, the audit log. Knows no route."""
