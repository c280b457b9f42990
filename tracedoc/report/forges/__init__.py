"""What GitHub and GitLab read: comments, annotations, SARIF, JUnit, code quality."""
