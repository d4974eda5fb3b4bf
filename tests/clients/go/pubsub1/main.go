// Runs the scenarios with cloud.google.com/go/pubsub.
package main

import (
	"context"
	"fmt"
	"time"

	"cloud.google.com/go/iam"
	"cloud.google.com/go/pubsub"
	"google.golang.org/api/option"
	scenarios "landline.test/clients"
)

type client struct {
	*pubsub.Client
	project string
	topics  map[string]*pubsub.Topic
}

func main() {
	scenarios.Main(func(ctx context.Context, project string, options ...option.ClientOption) (scenarios.Client, error) {
		inner, err := pubsub.NewClient(ctx, project, options...)
		return &client{inner, project, map[string]*pubsub.Topic{}}, err
	})
}

func (c *client) CreateTopic(ctx context.Context, topic, avroSchema string) error {
	config := &pubsub.TopicConfig{}
	if avroSchema != "" {
		schemas, err := pubsub.NewSchemaClient(ctx, c.project, scenarios.SchemaOptions()...)
		if err != nil {
			return err
		}
		defer schemas.Close()
		schema, err := schemas.CreateSchema(ctx, "order", pubsub.SchemaConfig{Type: pubsub.SchemaAvro, Definition: avroSchema})
		if err != nil {
			return err
		}
		config.SchemaSettings = &pubsub.SchemaSettings{Schema: schema.Name, Encoding: pubsub.EncodingJSON}
	}
	made, err := c.CreateTopicWithConfig(ctx, topic, config)
	if err == nil {
		made.EnableMessageOrdering = true
		made.PublishSettings.Timeout = scenarios.Outage
		c.topics[topic] = made
	}
	return err
}

func (c *client) UseTopic(ctx context.Context, topic string) error {
	c.topics[topic] = c.Topic(topic)
	_, err := c.topics[topic].Config(ctx)
	return err
}

func (c *client) Compress(topic string) {
	c.topics[topic].PublishSettings.EnableCompression = true
	c.topics[topic].PublishSettings.CompressionBytesThreshold = 1
}

func (c *client) Update(ctx context.Context, subscription string, to scenarios.Shown) (scenarios.Shown, error) {
	change := pubsub.SubscriptionConfigToUpdate{
		AckDeadline: time.Duration(to.AckDeadlineSeconds) * time.Second,
		Labels:      map[string]string{"team": to.Label},
	}
	sub := c.Subscription(subscription)
	if _, err := sub.Update(ctx, change); err != nil {
		return scenarios.Shown{}, err
	}
	config, err := sub.Config(ctx)
	return scenarios.Shown{AckDeadlineSeconds: int(config.AckDeadline.Seconds()), Label: config.Labels["team"]}, err
}

func (c *client) AddMember(ctx context.Context, topic, role, member string) ([]string, error) {
	handle := c.topics[topic].IAM()
	policy, err := handle.Policy(ctx)
	if err != nil {
		return nil, err
	}
	policy.Add(member, iam.RoleName(role))
	if err := handle.SetPolicy(ctx, policy); err != nil {
		return nil, err
	}
	policy, err = handle.Policy(ctx)
	if err != nil {
		return nil, err
	}
	return policy.Members(iam.RoleName(role)), nil
}

func (c *client) TestPermissions(ctx context.Context, topic string, permissions []string) ([]string, error) {
	return c.topics[topic].IAM().TestPermissions(ctx, permissions)
}

func (c *client) CreateSubscription(ctx context.Context, subscription, topic string, options scenarios.Options) error {
	config := pubsub.SubscriptionConfig{
		Topic:                     c.topics[topic],
		EnableMessageOrdering:     options.Ordered,
		EnableExactlyOnceDelivery: options.ExactlyOnce,
		RetainAckedMessages:       options.RetainAcked,
		Filter:                    options.Filter,
	}
	if options.DeadLetterTopic != "" {
		name := c.topics[options.DeadLetterTopic].String()
		config.DeadLetterPolicy = &pubsub.DeadLetterPolicy{DeadLetterTopic: name, MaxDeliveryAttempts: 5}
	}
	_, err := c.Client.CreateSubscription(ctx, subscription, config)
	return err
}

func (c *client) Publish(ctx context.Context, topic string, m scenarios.Message) func() (string, error) {
	result := c.topics[topic].Publish(ctx, &pubsub.Message{Data: m.Data, Attributes: m.Attributes, OrderingKey: m.Key})
	return func() (string, error) { return result.Get(ctx) }
}

func (c *client) Receive(ctx context.Context, subscription string, maxOutstanding int, handle func(scenarios.Message)) error {
	sub := c.Subscription(subscription)
	sub.ReceiveSettings.MaxOutstandingMessages = maxOutstanding
	return sub.Receive(ctx, func(_ context.Context, m *pubsub.Message) {
		got := scenarios.Message{ID: m.ID, Key: m.OrderingKey, Data: m.Data, Attributes: m.Attributes, Ack: m.Ack, Nack: m.Nack}
		if m.DeliveryAttempt != nil {
			got.Attempt = *m.DeliveryAttempt
		}
		got.AckConfirmed = func(ctx context.Context) (bool, error) {
			status, err := m.AckWithResult().Get(ctx)
			return status == pubsub.AcknowledgeStatusSuccess, err
		}
		handle(got)
	})
}

func (c *client) Seek(ctx context.Context, subscription string, to time.Time) error {
	return c.Subscription(subscription).SeekToTime(ctx, to)
}

func (c *client) Snapshot(ctx context.Context, subscription, snapshot string) error {
	_, err := c.Subscription(subscription).CreateSnapshot(ctx, snapshot)
	return err
}

func (c *client) SeekSnapshot(ctx context.Context, subscription, snapshot string) error {
	return c.Subscription(subscription).SeekToSnapshot(ctx, c.Client.Snapshot(snapshot))
}

func (c *client) Detach(ctx context.Context, subscription string) (bool, error) {
	if _, err := c.DetachSubscription(ctx, fmt.Sprintf("projects/%s/subscriptions/%s", c.project, subscription)); err != nil {
		return false, err
	}
	config, err := c.Subscription(subscription).Config(ctx)
	return config.Detached, err
}
