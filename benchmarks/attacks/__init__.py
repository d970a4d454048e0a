"""What a service's other clients feel while somebody without a key attacks its connections."""
